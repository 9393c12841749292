"""Reports: what runs say as one HTML page, as Markdown and as CSV, from one model of tables."""
