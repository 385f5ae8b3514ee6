"""Comparisons with other packages' attention, on random weights: nothing is downloaded."""
