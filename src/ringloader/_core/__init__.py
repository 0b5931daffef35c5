"""Pure decisions: no descriptor, process, thread, clock, environment or torch in here."""
