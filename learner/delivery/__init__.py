"""Issue tasks and consume groups: lease, issuer, consumer, accounting, audits. All Redis access is here."""
