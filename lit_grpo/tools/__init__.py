"""Tools around a run: doctor, report, dashboards, simulation, and their commands."""
