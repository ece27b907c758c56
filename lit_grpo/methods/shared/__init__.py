"""Base classes and functions that several methods share. No plug-in is here, and none is named here."""
