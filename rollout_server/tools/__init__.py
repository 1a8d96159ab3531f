"""Tools that a policy may call besides the search: the seam, and one file for each."""
