"""The application: finds objects in photographs and videos with a compiled model, by commands and on a page."""
