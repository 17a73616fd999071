"""Bridges to libraries that have a public place for an attention function; each imports its library when it is used."""
