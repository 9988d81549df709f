//! Search for the highest rate at which an objective holds.
//!
//! Each trial runs at one rate for several seconds, so the limit must be found in few trials. The search doubles the
//! rate until a trial fails, then bisects by geometric mean between the highest rate that held and the lowest that
//! failed, until their ratio is within the precision.
//!
//! A trial can be wrong: a burst on a shared machine makes a sustainable rate fail, and luck lets an unsustainable one
//! hold. A failure therefore counts only after it occurred twice, and a rate is reported only after it held twice: at
//! the limit a server fails one trial in two, and a rate that held once by luck is unlikely to hold again. If the
//! confirmation fails, the search continues below.
//!
//! The module performs no I/O: [`Search::next`] returns the next trial, [`Search::observe`] takes its result.

/// Maximum number of trials of a search.
pub const TRIALS_MAX: usize = 40;

/// Default precision of the result: 5 %.
pub const PRECISION: f64 = 0.05;

/// Next step of the search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SearchStep {
    /// Test whether the objective holds at this rate, in requests per second.
    Try(f64),
    /// The search is complete.
    Done(CapacityBounds),
}

/// Result of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CapacityBounds {
    /// Highest rate that held, in requests per second; `None` if not even the lowest did.
    pub held: Option<f64>,
    /// Lowest rate that failed; `None` if none did.
    pub failed: Option<f64>,
}

/// State of a search.
#[derive(Clone, Debug)]
pub struct Search {
    from: f64,
    lowest: f64,
    highest: f64,
    precision: f64,
    /// Rates that held, ascending, each with its number of trials.
    held: Vec<(f64, u32)>,
    /// Lowest rate that failed twice.
    failed: Option<f64>,
    /// Rate that failed once.
    failed_once: Option<f64>,
    trials: usize,
}

impl Search {
    /// Creates a search that starts at `from` requests per second and stays between `lowest` and `highest`.
    pub fn new(from: f64, lowest: f64, highest: f64, precision: f64) -> Search {
        Search {
            from,
            lowest,
            highest,
            precision,
            held: Vec::new(),
            failed: None,
            failed_once: None,
            trials: 0,
        }
    }

    /// Returns the next step.
    pub fn next(&self) -> SearchStep {
        let best = self.held.last().copied();
        let found =
            SearchStep::Done(CapacityBounds { held: best.map(|(rate, _)| rate), failed: self.failed });
        if self.trials >= TRIALS_MAX {
            return found;
        }
        if let Some(rate) = self.failed_once {
            return SearchStep::Try(rate);
        }
        let near = |held: f64| match self.failed {
            Some(failed) => failed / held <= 1.0 + self.precision,
            None => held >= self.highest,
        };
        match (best, self.failed) {
            (None, None) => SearchStep::Try(self.from),
            (None, Some(failed)) if failed <= self.lowest => found,
            (None, Some(failed)) => SearchStep::Try((failed / 2.0).max(self.lowest)),
            (Some((held, times)), _) if near(held) => {
                if times < 2 {
                    SearchStep::Try(held)
                } else {
                    found
                }
            }
            (Some((held, _)), None) => SearchStep::Try((held * 2.0).min(self.highest)),
            (Some((held, _)), Some(failed)) => SearchStep::Try((held * failed).sqrt()),
        }
    }

    /// Records whether the objective held at `rate`.
    pub fn observe(&mut self, rate: f64, held: bool) {
        self.trials += 1;
        match (held, self.failed_once.take()) {
            (true, _) => match self.held.last_mut() {
                Some((best, times)) if *best == rate => *times += 1,
                Some(_) | None => self.held.push((rate, 1)),
            },
            (false, Some(failed_once)) if failed_once == rate => {
                self.failed = Some(rate);
                // An earlier success at this rate was luck.
                self.held.retain(|(held, _)| *held < rate);
            }
            (false, _) => self.failed_once = Some(rate),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    /// Runs a search against a simulated server; returns the result and the number of trials.
    fn found(mut search: Search, mut holds: impl FnMut(f64) -> bool) -> (CapacityBounds, usize) {
        for trials in 0..=TRIALS_MAX {
            match search.next() {
                SearchStep::Try(rate) => search.observe(rate, holds(rate)),
                SearchStep::Done(capacity) => return (capacity, trials),
            }
        }
        panic!("more than {TRIALS_MAX} trials: {search:?}")
    }

    fn search(from: f64) -> Search {
        Search::new(from, 1.0, 100_000.0, PRECISION)
    }

    #[test]
    fn the_limit_of_a_deterministic_server_is_found_within_the_precision() {
        for edge in [1.5, 3.0, 47.0, 200.0, 999.0, 12_345.0, 99_000.0] {
            for from in [1.0, 10.0, 300.0, 50_000.0] {
                let (capacity, trials) = found(search(from), |rate| rate <= edge);
                let held = capacity.held.unwrap();
                assert!(held <= edge && held >= edge / (1.0 + PRECISION), "{held} of {edge} from {from}");
                assert!(
                    capacity.failed.unwrap() > edge && trials <= TRIALS_MAX,
                    "{capacity:?}, {trials} trials"
                );
            }
        }
    }

    #[test]
    fn a_server_without_a_limit_has_none() {
        assert_eq!(found(search(10.0), |_| true).0, CapacityBounds { held: Some(100_000.0), failed: None });
        assert_eq!(found(search(10.0), |_| false).0, CapacityBounds { held: None, failed: Some(1.0) });
    }

    /// Simulates a server that holds or fails at random near its limit, with a logistic transition about a tenth wide.
    fn noisy(edge: f64, rate: f64, rng: &mut SmallRng) -> bool {
        let beyond = (rate / edge).ln() / 0.1;
        // One trial in fifty fails because of other load on the machine, at any rate.
        rng.random::<f64>() < 0.98 / (1.0 + (4.0 * beyond).exp())
    }

    #[test]
    fn the_limit_of_a_noisy_server_is_almost_always_found() {
        let mut off = 0;
        for seed in 0..500 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let (capacity, _) = found(search(20.0), |rate| noisy(300.0, rate, &mut rng));
            let held = capacity.held.unwrap_or(0.0);
            off += usize::from(!(240.0..=345.0).contains(&held));
        }
        // The seeds are fixed, so the result is deterministic.
        assert!(off <= 10, "{off} of 500 searches ended more than 20 % below or 15 % above the edge");
    }

    #[test]
    fn one_wrong_trial_does_not_end_the_search() {
        let mut trials = 0;
        let (capacity, _) = found(search(100.0), |rate| {
            trials += 1;
            trials != 2 && rate <= 1000.0
        });
        assert!(capacity.held.unwrap() > 950.0, "{capacity:?}");
    }
}
