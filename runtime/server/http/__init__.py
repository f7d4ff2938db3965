"""HTTP: connections, limits on clients, and the front end that all protocols share."""
