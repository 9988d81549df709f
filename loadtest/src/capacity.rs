//! The highest rate at which an objective still holds.
//!
//! One asks for a rate and is told whether it held; where the edge is has to be found in a few tries, each of which costs
//! seconds of somebody's machine. The search doubles until a rate fails, then goes between the highest that held and the
//! lowest that failed, always by ratio, until they are as near to each other as was asked.
//!
//! A try can lie. A neighbour's burst makes a rate fail that would hold; luck lets one hold that would not. So a failure is
//! believed when it has happened twice, and a rate is reported only when it has held twice: at the edge a server fails one
//! in two, and a rate that held by luck once is unlikely to do so again. Where the confirmation fails, the search goes on below.
//!
//! Nothing here runs anything: [`Search::next`] says what to try, [`Search::observe`] takes in how it went.

/// Tries of one search.
pub const TRIES_MAX: usize = 40;

/// How near the edge is found unless somebody says: within 5 %.
pub const PRECISION: f64 = 0.05;

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// See whether the objective holds at so many requests a second.
    Try(f64),
    /// It is found.
    Done(Capacity),
}

/// Where the edge is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// The highest rate that held, in requests per second; none if not even the lowest did.
    pub held: Option<f64>,
    /// The lowest that did not; none if all did.
    pub failed: Option<f64>,
}

/// A search.
#[derive(Clone, Debug)]
pub struct Search {
    from: f64,
    lowest: f64,
    highest: f64,
    precision: f64,
    /// Rates that held and how often, from the lowest on.
    held: Vec<(f64, u32)>,
    /// The lowest that failed twice.
    failed: Option<f64>,
    /// A rate that failed once.
    doubted: Option<f64>,
    tries: usize,
}

impl Search {
    /// A search that begins at `from` requests a second, goes no lower than `lowest` and no higher than `highest`.
    pub fn new(from: f64, lowest: f64, highest: f64, precision: f64) -> Search {
        Search { from, lowest, highest, precision, held: Vec::new(), failed: None, doubted: None, tries: 0 }
    }

    /// What to try next, or what was found.
    pub fn next(&self) -> Step {
        let best = self.held.last().copied();
        let found = Step::Done(Capacity { held: best.map(|(rate, _)| rate), failed: self.failed });
        if self.tries >= TRIES_MAX {
            return found;
        }
        if let Some(rate) = self.doubted {
            return Step::Try(rate);
        }
        let near = |held: f64| match self.failed {
            Some(failed) => failed / held <= 1.0 + self.precision,
            None => held >= self.highest,
        };
        match (best, self.failed) {
            (None, None) => Step::Try(self.from),
            (None, Some(failed)) if failed <= self.lowest => found,
            (None, Some(failed)) => Step::Try((failed / 2.0).max(self.lowest)),
            (Some((held, times)), _) if near(held) => {
                if times < 2 {
                    Step::Try(held)
                } else {
                    found
                }
            }
            (Some((held, _)), None) => Step::Try((held * 2.0).min(self.highest)),
            (Some((held, _)), Some(failed)) => Step::Try((held * failed).sqrt()),
        }
    }

    /// Takes in whether the objective held at `rate`.
    pub fn observe(&mut self, rate: f64, held: bool) {
        self.tries += 1;
        match (held, self.doubted.take()) {
            (true, _) => match self.held.last_mut() {
                Some((best, times)) if *best == rate => *times += 1,
                Some(_) | None => self.held.push((rate, 1)),
            },
            (false, Some(doubted)) if doubted == rate => {
                self.failed = Some(rate);
                // If it held before, it had luck.
                self.held.retain(|(held, _)| *held < rate);
            }
            (false, _) => self.doubted = Some(rate),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    /// What is found of a server, and in how many tries.
    fn found(mut search: Search, mut holds: impl FnMut(f64) -> bool) -> (Capacity, usize) {
        for tries in 0..=TRIES_MAX {
            match search.next() {
                Step::Try(rate) => search.observe(rate, holds(rate)),
                Step::Done(capacity) => return (capacity, tries),
            }
        }
        panic!("more than {TRIES_MAX} tries: {search:?}")
    }

    fn search(from: f64) -> Search {
        Search::new(from, 1.0, 100_000.0, PRECISION)
    }

    #[test]
    fn the_edge_of_a_server_that_never_wavers_is_found_within_the_precision() {
        for edge in [1.5, 3.0, 47.0, 200.0, 999.0, 12_345.0, 99_000.0] {
            for from in [1.0, 10.0, 300.0, 50_000.0] {
                let (capacity, tries) = found(search(from), |rate| rate <= edge);
                let held = capacity.held.unwrap();
                assert!(held <= edge && held >= edge / (1.0 + PRECISION), "{held} of {edge} from {from}");
                assert!(capacity.failed.unwrap() > edge && tries <= TRIES_MAX, "{capacity:?}, {tries} tries");
            }
        }
    }

    #[test]
    fn a_server_without_an_edge_has_none() {
        assert_eq!(found(search(10.0), |_| true).0, Capacity { held: Some(100_000.0), failed: None });
        assert_eq!(found(search(10.0), |_| false).0, Capacity { held: None, failed: Some(1.0) });
    }

    /// Near its edge a server holds or fails by chance: within a tenth of it the more surely the farther away.
    fn noisy(edge: f64, rate: f64, rng: &mut SmallRng) -> bool {
        let beyond = (rate / edge).ln() / 0.1;
        // A neighbour spoils one try in fifty wherever it is.
        rng.random::<f64>() < 0.98 / (1.0 + (4.0 * beyond).exp())
    }

    #[test]
    fn the_edge_of_a_noisy_server_is_found_nearly_always() {
        let mut off = 0;
        for seed in 0..500 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let (capacity, _) = found(search(20.0), |rate| noisy(300.0, rate, &mut rng));
            let held = capacity.held.unwrap_or(0.0);
            off += usize::from(!(240.0..=345.0).contains(&held));
        }
        // Seeds are fixed: this is no chance but a number that was looked at.
        assert!(off <= 10, "{off} of 500 searches ended more than 20 % below or 15 % above the edge");
    }

    #[test]
    fn one_spoiled_try_does_not_end_the_search() {
        let mut tries = 0;
        let (capacity, _) = found(search(100.0), |rate| {
            tries += 1;
            tries != 2 && rate <= 1000.0
        });
        assert!(capacity.held.unwrap() > 950.0, "{capacity:?}");
    }
}
