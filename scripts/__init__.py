"""Programs that make what the repository holds: policies, tables and pages."""
