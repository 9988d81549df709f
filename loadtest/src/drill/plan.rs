//! Request rate of each load over the run, including surges.

use std::time::Duration;

use super::{Action, ClientLoad, Drill};

impl Drill {
    /// Returns the rate of a load over the run, in the syntax of `meridian load --rate`.
    pub fn profile(&self, load: &ClientLoad) -> String {
        let stages = self.stages(load);
        let stage = |(rate, duration): &(f64, Duration)| format!("{rate} for {}ms", duration.as_millis());
        stages.iter().map(stage).collect::<Vec<_>>().join(", ")
    }

    /// Returns the expected number of requests of one load, or of all, between two times.
    pub fn requests(&self, load: Option<&str>, from: Duration, to: Duration) -> f64 {
        let counted = self.loads.iter().filter(|each| load.is_none_or(|name| each.name == name));
        counted.map(|load| self.requests_of(load, from, to)).sum()
    }

    fn requests_of(&self, load: &ClientLoad, from: Duration, to: Duration) -> f64 {
        let (mut begins, mut requests) = (Duration::ZERO, 0.0);
        for (rate, duration) in self.stages(load) {
            let (first, last) = (begins.max(from), (begins + duration).min(to));
            requests += rate * last.saturating_sub(first).as_secs_f64();
            begins += duration;
        }
        requests
    }

    fn stages(&self, load: &ClientLoad) -> Vec<(f64, Duration)> {
        let surges: Vec<(Duration, Duration, f64)> = self
            .steps
            .iter()
            .flat_map(|step| step.actions.iter().map(move |(_, action)| (step.at, action)))
            .filter_map(|(at, action)| match action {
                Action::Surge { times, duration, load: name }
                    if name.as_ref().is_none_or(|name| *name == load.name) =>
                {
                    Some((at, (at + *duration).min(self.duration), *times))
                }
                Action::Surge { .. }
                | Action::Process(..)
                | Action::Link(..)
                | Action::SlowReplicas(..)
                | Action::Drain(_)
                | Action::Undrain(_) => None,
            })
            .collect();
        let edges = surges.iter().flat_map(|(from, to, _)| [*from, *to]);
        let mut edges: Vec<Duration> = edges.chain([Duration::ZERO, self.duration]).collect();
        edges.sort();
        edges.dedup();
        let stage = |pair: &[Duration]| {
            let during = surges.iter().filter(|(from, to, _)| *from <= pair[0] && pair[1] <= *to);
            let times: f64 = during.map(|(_, _, times)| times).product();
            (load.rate * times, pair[1] - pair[0])
        };
        edges.windows(2).map(stage).collect()
    }
}
