"""The command ``optimize bench``: measures a bundle's speeds and compares them with this machine's limits."""
