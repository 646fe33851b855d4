"""Pictures of what heads attend to: in the terminal, as a figure, as one page."""
