"""One emitter a target: it lowers a program, packs its weights and writes both into a bundle."""
