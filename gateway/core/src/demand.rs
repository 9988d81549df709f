//! How much this gateway is asked for, by class and origin, for whoever plans.
//!
//! Counted is what is *asked*, before anybody decides whether there is room: a plan that saw only what was served would
//! never see that something is lacking. Told is an average that forgets half of what it knew in [`HALF_LIFE`], so that a
//! surge is there within seconds, and a pause between two beats is not.
//!
//! The hub is told of all tokens of a class together. What part of them are lookups stays here, for whoever draws by the plan
//! ([`crate::weights::throw`]).
//!
//! A class is told of for [`KEPT`] after it was last asked for, whether or not there is anything to tell: the message is as
//! long in calm as in crisis. Classes come from requests, and a header can make a new one; so there is room for so many, and
//! what is asked beyond it is not planned for and is counted as that.

use crate::circuit::Permille;
use crate::priority::Priority;
use crate::residency::Residency;
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
/// Bytes of the residencies of all classes: a header can make one of 4 KiB, and a hub takes a report of 2 MiB. Half of that,
/// because a name of a deployment and of a region and their quotation marks stand beside each.
pub const RESIDENCY_BYTES_MAX: usize = 1 << 20;

/// What is asked for.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    classes: BTreeMap<DeploymentName, Vec<Class>>,
    kept: usize,
    /// Bytes of their residencies.
    bytes: usize,
    /// Requests of classes for which there was no room.
    missed: u64,
    told: Option<Instant>,
}

#[derive(Clone, Debug)]
struct Class {
    residency: Residency,
    allowed: RegionSet,
    origin: RegionIndex,
    all: Counter,
    /// Those of the interactive priority among them.
    lookups: Counter,
    asked: Instant,
}

/// Tokens that are asked for.
#[derive(Clone, Debug, Default)]
struct Counter {
    /// Since they were last told of.
    tokens: u64,
    /// Per second.
    rate: Option<Ewma>,
}

/// One class, as it is told of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// What is asked for.
    pub deployment: DeploymentName,
    /// The residency policy that it travels under.
    pub residency: Residency,
    /// Where it comes from.
    pub origin: RegionIndex,
    /// How much.
    pub tokens_per_second: u64,
}

impl Demand {
    /// Somebody asks for about so many tokens. Returns what part of what is asked are lookups, as it was when the class was
    /// last told of.
    pub fn asked(
        &mut self,
        deployment: &DeploymentName,
        (residency, allowed): (&Residency, RegionSet),
        origin: RegionIndex,
        (priority, tokens): (Priority, u64),
        now: Instant,
    ) -> Option<Permille> {
        let known = self.classes.get_mut(deployment);
        if let Some(class) =
            known.and_then(|classes| classes.iter_mut().find(|class| class.is(origin, allowed)))
        {
            class.count(priority, tokens);
            class.asked = now;
            return class.lookups();
        }
        let there = self.classes.get(deployment).map_or(0, Vec::len);
        let bytes = self.bytes + residency.as_str().len();
        if there >= CLASSES_PER_DEPLOYMENT_MAX || self.kept >= CLASSES_MAX || bytes > RESIDENCY_BYTES_MAX {
            self.missed += 1;
            return None;
        }
        self.kept += 1;
        self.bytes = bytes;
        let (all, lookups) = (Counter::default(), Counter::default());
        let mut class = Class { residency: residency.clone(), allowed, origin, all, lookups, asked: now };
        class.count(priority, tokens);
        self.classes.entry(deployment.clone()).or_default().push(class);
        None
    }

    /// What part of what is asked are lookups, as it was when the class was last told of.
    pub fn lookups(
        &self,
        deployment: &DeploymentName,
        allowed: RegionSet,
        origin: RegionIndex,
    ) -> Option<Permille> {
        self.classes.get(deployment)?.iter().find(|class| class.is(origin, allowed))?.lookups()
    }

    /// Everything that there is to tell. To be called about once a second.
    pub fn tell(&mut self, now: Instant) -> Vec<Asked> {
        let since = self.told.replace(now).map(|told| now.saturating_duration_since(told));
        let mut told = Vec::with_capacity(self.kept);
        for (deployment, classes) in &mut self.classes {
            classes.retain(|class| now.saturating_duration_since(class.asked) <= KEPT);
            for class in classes {
                class.lookups.per_second(since, now);
                told.push(Asked {
                    deployment: deployment.clone(),
                    residency: class.residency.clone(),
                    origin: class.origin,
                    tokens_per_second: class.all.per_second(since, now).round() as u64,
                });
            }
        }
        self.classes.retain(|_, classes| !classes.is_empty());
        self.kept = told.len();
        self.bytes = told.iter().map(|asked| asked.residency.as_str().len()).sum();
        told
    }

    /// Requests of classes for which there was no room, ever.
    pub fn missed(&self) -> u64 {
        self.missed
    }
}

impl Class {
    fn is(&self, origin: RegionIndex, allowed: RegionSet) -> bool {
        self.origin == origin && self.allowed == allowed
    }

    fn count(&mut self, priority: Priority, tokens: u64) {
        self.all.tokens = self.all.tokens.saturating_add(tokens);
        if priority == Priority::Interactive {
            self.lookups.tokens = self.lookups.tokens.saturating_add(tokens);
        }
    }

    /// The part of them, while anything is asked.
    fn lookups(&self) -> Option<Permille> {
        let (all, lookups) = (self.all.rate?.get(), self.lookups.rate?.get());
        (all > 0.0).then(|| Permille::new((lookups / all * 1000.0).round() as u16))
    }
}

impl Counter {
    /// What is asked per second, with what came since it was last told of.
    fn per_second(&mut self, since: Option<Duration>, now: Instant) -> f64 {
        // Before anything was told there is no time that what came could be divided by.
        let since = since.filter(|since| !since.is_zero()).unwrap_or(Duration::from_secs(1));
        let sample = std::mem::take(&mut self.tokens) as f64 / since.as_secs_f64();
        let rate = self.rate.get_or_insert_with(|| Ewma::new(HALF_LIFE, sample, now));
        rate.add(sample, now);
        rate.get()
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
        let (policy, tokens) = ((&anywhere, RegionSet::all(regions)), (Priority::Bulk, tokens));
        demand.asked(&name(deployment), policy, at(origin), tokens, now);
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
    fn the_part_of_lookups_is_that_of_the_tokens_of_their_class() {
        let (mut demand, mut now) = (Demand::default(), some_instant());
        let (anywhere, d) = (Residency::of(&ResidencyPolicy::Anywhere), name("d"));
        let policy = (&anywhere, RegionSet::all(8));
        let part = |demand: &Demand, origin| demand.lookups(&d, policy.1, at(origin)).map(Permille::get);
        demand.tell(now);
        for (priority, tokens) in [(Priority::Interactive, 100), (Priority::Bulk, 300)] {
            assert_eq!(demand.asked(&d, policy, at(0), (priority, tokens), now), None, "nobody has told yet");
        }
        demand.asked(&d, policy, at(1), (Priority::Interactive, 5), now);
        demand.asked(&d, policy, at(2), (Priority::Bulk, 5), now);
        now += SECOND;
        demand.tell(now);
        assert_eq!([0, 1, 2, 3].map(|origin| part(&demand, origin)), [Some(250), Some(1000), Some(0), None]);
        assert_eq!(demand.asked(&d, policy, at(0), (Priority::Bulk, 900), now), Some(Permille::new(250)));
        now += HALF_LIFE;
        demand.tell(now);
        assert_eq!(part(&demand, 0), Some(172), "half of 100 in half of 400 and half of 900 in five seconds");
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
    fn as_many_bytes_of_residencies_are_kept_as_may_be_and_one_more_is_not() {
        let (mut demand, now) = (Demand::default(), some_instant());
        let codes = ('a'..='z').flat_map(|a| ('a'..='z').map(move |b| format!("us-a{a}{b}"))).take(100);
        let text = codes.collect::<Vec<_>>().join(",");
        let long = Residency::of(&text.parse().unwrap());
        let each = long.as_str().len();
        let fit = RESIDENCY_BYTES_MAX / each;
        let mut ask = |number: usize, now| {
            let policy = (&long, RegionSet::all(1));
            demand.asked(&name(&format!("d{number}")), policy, at(0), (Priority::Bulk, 1), now);
            demand.missed()
        };
        assert_eq!((0..fit).map(|number| ask(number, now)).max(), Some(0));
        assert_eq!(ask(fit, now), 1);
        assert_eq!(demand.tell(now).len(), fit);
        assert!(demand.tell(now + KEPT + SECOND).is_empty());
        assert_eq!(demand.bytes, 0, "what is forgotten makes room");
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
