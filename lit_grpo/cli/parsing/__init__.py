"""Parsing the command line: names and fields are resolved, checked, and mistakes reported in one sentence."""
