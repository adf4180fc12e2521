"""From rows of runs.csv to a report: what it says (sections), and how it is shown (terminal, page)."""
