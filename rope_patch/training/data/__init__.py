"""Documents, and the rows of tokens that they are packed into."""
