"""Reports: verdicts of runs as one HTML page, as Markdown and as CSV, from one model of tables."""
