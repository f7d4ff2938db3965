"""Chat formats, the spelling of reasoning and tool calls: a file for each notation, and ``table.FORMATS``."""
