"""The hybrid prefix cache: MLA rows and KDA states that are found, restored and dropped together."""
