"""Records of techniques, a module for each group; each module has ``GROUP``."""
