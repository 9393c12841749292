"""Reports: what runs say as one HTML page, as Markdown, as CSV and as JSON lines, from one model of tables."""
