"""Images: from the bytes of a file to the patches that the vision tower reads."""
