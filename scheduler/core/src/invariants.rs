//! Named invariants, as functions. What makes a decision asserts them, properties check them after each step, and a test
//! breaks them on purpose.

use regions::Generation;

/// A route table does not supersede the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("generation {next} does not supersede {previous}, which came before it")]
pub struct NotMonotone {
    /// The one in hand.
    pub previous: Generation,
    /// The one that came after it.
    pub next: Generation,
}

/// **Monotone plans**: (epoch, number) only rises at each reader.
pub fn monotone(previous: Generation, next: Generation) -> Result<(), NotMonotone> {
    if next > previous { Ok(()) } else { Err(NotMonotone { previous, next }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_does_not_rise_breaks_monotone_plans() {
        for (previous, next, rises) in [
            ("1.4", "1.5", true),
            ("1.4", "2.0", true),
            ("1.4", "1.4", false),
            ("1.4", "1.3", false),
            ("2.0", "1.9", false),
        ] {
            let (previous, next) = (previous.parse().unwrap(), next.parse().unwrap());
            let expected = if rises { Ok(()) } else { Err(NotMonotone { previous, next }) };
            assert_eq!(monotone(previous, next), expected);
        }
    }
}
