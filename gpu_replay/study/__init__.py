"""The study: every kind of replay on three small environments, and the Blind Cliffwalk."""
