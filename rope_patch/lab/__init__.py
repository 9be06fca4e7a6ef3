"""The lab: the same tiny decoder, trained short with each positional encoding and tested long."""
