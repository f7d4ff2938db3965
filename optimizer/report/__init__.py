"""What an export did and what its program costs: report.json, a terminal summary, an HTML page, a trace."""
