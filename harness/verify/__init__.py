"""Walking cases through their stages, each in a process of its own."""
