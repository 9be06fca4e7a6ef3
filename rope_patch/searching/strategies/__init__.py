"""The strategies of a search: each proposes candidates and learns from their fitness."""
