"""What happens around a run: check-up, report, dashboards, simulation, and the commands that lead to them."""
