"""How operators become fast loops, one package per kind of target."""
