"""Images and videos as the vision tower takes them: read within bounds, resized, cut, put into a prompt."""
