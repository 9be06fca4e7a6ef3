"""The strategies that propose candidates."""
