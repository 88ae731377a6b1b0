"""What the miniature learns: one module a skill, each a maker of short exchanges with a checkable answer."""
