"""The report of an export and of its program's costs: report.json, a terminal summary, an HTML page, a trace."""
