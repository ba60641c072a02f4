"""Ranks on Ray: one actor each. Decisions are in planaria.topology and in the pure modules here (`names`,
`environment`); the rest asks Ray and carries out. Ray is imported inside functions only, by whoever needs it."""
