"""Media, answers and times as lines of a terminal. Reads no files and decodes nothing."""
