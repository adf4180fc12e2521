"""Many runs from one command: the points of a sweep, a process for each, and what is still to be run."""
