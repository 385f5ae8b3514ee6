"""One file per scheme: its formula, the same formula as terms, and what is registered of it.

A file that lies here is found when `SCHEMES` is first read; no list of schemes has to be kept.
"""
