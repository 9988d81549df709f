//! How much this gateway is asked for, by class and origin, for whoever plans.
//!
//! Counted is what is *asked*, before anybody decides whether there is room: a plan that saw only what was served would
//! never see that something is lacking. Told is an average that forgets half of what it knew in [`HALF_LIFE`], so that a
//! surge is there within seconds, and a pause between two beats is not.
//!
//! A class is told of for [`KEPT`] after it was last asked for, whether or not there is anything to tell: the message is as
//! long in calm as in crisis. Classes come from requests, and a header can make a new one; so there is room for so many, and
//! what is asked beyond it is not planned for and is counted as that.

use crate::lawful::Residency;
use regions::ewma::Ewma;
use regions::id::DeploymentName;
use regions::set::{RegionIndex, RegionSet};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Half of what is told was asked in the last so many seconds.
const HALF_LIFE: Duration = Duration::from_secs(5);
/// How long a class is told of that nobody asks for.
pub const KEPT: Duration = Duration::from_secs(600);
/// Classes of one deployment, which are looked through for each request.
pub const CLASSES_PER_DEPLOYMENT_MAX: usize = 64;
/// All classes.
pub const CLASSES_MAX: usize = 8192;

/// What is asked for.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    classes: BTreeMap<DeploymentName, Vec<Class>>,
    kept: usize,
    /// Requests of classes for which there was no room.
    missed: u64,
    told: Option<Instant>,
}

#[derive(Clone, Debug)]
struct Class {
    residency: Residency,
    allowed: RegionSet,
    origin: RegionIndex,
    /// Since it was last told of.
    tokens: u64,
    rate: Option<Ewma>,
    asked: Instant,
}

/// One class, as it is told of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// What is asked for.
    pub deployment: DeploymentName,
    /// The law that it travels under.
    pub residency: Residency,
    /// Where it comes from.
    pub origin: RegionIndex,
    /// How much.
    pub tokens_per_second: u64,
}

impl Demand {
    /// Somebody asks for about so many tokens.
    pub fn asked(
        &mut self,
        deployment: &DeploymentName,
        (residency, allowed): (&Residency, RegionSet),
        origin: RegionIndex,
        tokens: u64,
        now: Instant,
    ) {
        let known = self.classes.get_mut(deployment);
        if let Some(class) = known.and_then(|classes| {
            classes.iter_mut().find(|class| class.origin == origin && class.allowed == allowed)
        }) {
            class.tokens = class.tokens.saturating_add(tokens);
            class.asked = now;
            return;
        }
        let there = self.classes.get(deployment).map_or(0, Vec::len);
        if there >= CLASSES_PER_DEPLOYMENT_MAX || self.kept >= CLASSES_MAX {
            self.missed += 1;
            return;
        }
        self.kept += 1;
        let class = Class { residency: residency.clone(), allowed, origin, tokens, rate: None, asked: now };
        self.classes.entry(deployment.clone()).or_default().push(class);
    }

    /// Everything that there is to tell. To be called about once a second.
    pub fn tell(&mut self, now: Instant) -> Vec<Asked> {
        let since = self.told.replace(now).map(|told| now.saturating_duration_since(told));
        let mut told = Vec::with_capacity(self.kept);
        for (deployment, classes) in &mut self.classes {
            classes.retain(|class| now.saturating_duration_since(class.asked) <= KEPT);
            for class in classes {
                told.push(Asked {
                    deployment: deployment.clone(),
                    residency: class.residency.clone(),
                    origin: class.origin,
                    tokens_per_second: class.per_second(since, now),
                });
            }
        }
        self.classes.retain(|_, classes| !classes.is_empty());
        self.kept = told.len();
        told
    }

    /// Requests of classes for which there was no room, ever.
    pub fn missed(&self) -> u64 {
        self.missed
    }
}

impl Class {
    /// What is asked of it per second, with what came since it was last told of.
    fn per_second(&mut self, since: Option<Duration>, now: Instant) -> u64 {
        // Before anything was told there is no time that what came could be divided by.
        let since = since.filter(|since| !since.is_zero()).unwrap_or(Duration::from_secs(1));
        let sample = std::mem::take(&mut self.tokens) as f64 / since.as_secs_f64();
        let rate = self.rate.get_or_insert_with(|| Ewma::new(HALF_LIFE, sample, now));
        rate.add(sample, now);
        rate.get().round() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use regions::residency::ResidencyPolicy;

    const SECOND: Duration = Duration::from_secs(1);

    fn name(text: &str) -> DeploymentName {
        text.parse().unwrap()
    }

    fn at(number: usize) -> RegionIndex {
        RegionIndex::new(number).unwrap()
    }

    fn asks(demand: &mut Demand, deployment: &str, regions: usize, origin: usize, tokens: u64, now: Instant) {
        let anywhere = Residency::of(&ResidencyPolicy::Anywhere);
        demand.asked(&name(deployment), (&anywhere, RegionSet::all(regions)), at(origin), tokens, now);
    }

    fn told(demand: &mut Demand, now: Instant) -> Vec<(String, usize, u64)> {
        let told = demand.tell(now).into_iter();
        told.map(|asked| (asked.deployment.to_string(), asked.origin.as_usize(), asked.tokens_per_second))
            .collect()
    }

    #[test]
    fn what_is_asked_is_told_by_class_and_origin_as_an_average_that_forgets() {
        let (mut demand, mut now) = (Demand::default(), some_instant());
        demand.tell(now);
        for _ in 0..3 {
            now += SECOND;
            asks(&mut demand, "d", 8, 0, 400, now);
            asks(&mut demand, "d", 8, 0, 600, now);
            asks(&mut demand, "d", 8, 5, 10, now);
            asks(&mut demand, "d", 3, 0, 20, now);
            let each = |origin, tokens| ("d".to_owned(), origin, tokens);
            assert_eq!(told(&mut demand, now), [each(0, 1000), each(5, 10), each(0, 20)]);
        }
        now += HALF_LIFE;
        assert_eq!(told(&mut demand, now)[0].2, 500);
        asks(&mut demand, "d", 8, 0, 5 * 1500, now);
        now += HALF_LIFE;
        assert_eq!(told(&mut demand, now)[0].2, 1000);
    }

    #[test]
    fn a_class_that_nobody_asks_for_is_told_of_for_a_while() {
        let (mut demand, now) = (Demand::default(), some_instant());
        asks(&mut demand, "d", 8, 0, 1, now);
        assert_eq!(told(&mut demand, now + KEPT).len(), 1);
        assert_eq!(told(&mut demand, now + KEPT + SECOND), []);
        asks(&mut demand, "d", 8, 0, 1, now + KEPT + SECOND);
        assert_eq!(told(&mut demand, now + KEPT + SECOND).len(), 1, "and anew");
    }

    #[test]
    fn as_many_classes_are_counted_as_may_be_and_one_more_is_missed() {
        let (mut demand, now) = (Demand::default(), some_instant());
        for regions in 1..=CLASSES_PER_DEPLOYMENT_MAX {
            asks(&mut demand, "d", regions, 0, 1, now);
        }
        assert_eq!((demand.missed(), demand.kept), (0, CLASSES_PER_DEPLOYMENT_MAX));
        asks(&mut demand, "d", CLASSES_PER_DEPLOYMENT_MAX + 1, 0, 1, now);
        assert_eq!((demand.missed(), demand.kept), (1, CLASSES_PER_DEPLOYMENT_MAX));
        for number in CLASSES_PER_DEPLOYMENT_MAX..CLASSES_MAX {
            asks(&mut demand, &format!("e{number}"), 1, 0, 1, now);
        }
        assert_eq!((demand.missed(), demand.kept), (1, CLASSES_MAX));
        asks(&mut demand, "one-more", 1, 0, 1, now);
        assert_eq!((demand.missed(), told(&mut demand, now).len()), (2, CLASSES_MAX));
    }
}
