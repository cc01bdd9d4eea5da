"""Reports: tables, figures and pages, made from JSON alone."""
