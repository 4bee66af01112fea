"""C++ implementations of the operator families, built on first use; build.py builds them, csrc/ holds the sources."""
