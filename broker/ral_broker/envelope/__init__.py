"""From a plan to a running bubblewrap: what is shown, opened by handle, and handed over. No policy is read
here."""
