"""The testbed: a small trained model of Kolibri-1's architecture, how it was trained, and how to load it."""
