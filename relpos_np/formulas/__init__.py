"""Formulas that several schemes share, as plain functions on arrays."""
