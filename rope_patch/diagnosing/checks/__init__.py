"""The checks of a diagnosis, by what they look at."""
