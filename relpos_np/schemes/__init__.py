"""One file per scheme: the formula on arrays, and a class that states the same formula as terms."""
