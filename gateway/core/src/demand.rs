//! Demand of this gateway by class and origin, in tokens a second, as reported to the hub.
//!
//! All requests are counted before admission control: a plan from served requests alone would never show that capacity
//! is lacking. The reported rate is an average with a half-life of [`HALF_LIFE`], so that it follows a surge within
//! seconds and ignores a pause between two reports.
//!
//! The hub receives the total of each class. The interactive share stays local, for the draw by the plan
//! ([`crate::weights::throw`]).
//!
//! A class is reported for [`CLASS_RETENTION`] after its last request, even at a rate of zero: the message has the same
//! length in calm and crisis. Classes come from requests, and a header can make a new one; so their number is limited.
//! Requests of further classes are not planned for and are counted as untracked.

use crate::circuit::Permille;
use crate::residency::Residency;
use regions::ewma::Ewma;
use regions::id::DeploymentName;
use regions::set::{RegionIndex, RegionSet};
use replica_api::priority::Priority;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Half-life of the reported rates.
const HALF_LIFE: Duration = Duration::from_secs(5);
/// Time for which a class without requests is still reported.
pub const CLASS_RETENTION: Duration = Duration::from_secs(600);
/// Maximum classes of one deployment, which are scanned for each request.
pub const CLASSES_PER_DEPLOYMENT_MAX: usize = 64;
/// Maximum classes in total.
pub const CLASSES_MAX: usize = 8192;
/// Maximum bytes of the residencies of all classes: a header can make one of 4 KiB, and a hub accepts a report of 2
/// MiB. Half of that, because a deployment name, a region name and their quotation marks are sent with each.
pub const RESIDENCY_BYTES_MAX: usize = 1 << 20;

/// Demand of all classes.
#[derive(Clone, Debug, Default)]
pub struct DemandMeter {
    classes: BTreeMap<DeploymentName, Vec<DemandClass>>,
    class_count: usize,
    /// Bytes of the classes' residencies.
    residency_bytes: usize,
    /// Requests of classes beyond the limits.
    untracked: u64,
    last_report: Option<Instant>,
}

#[derive(Clone, Debug)]
struct DemandClass {
    residency: Residency,
    allowed: RegionSet,
    origin: RegionIndex,
    total: TokenCounter,
    /// Tokens of interactive requests, included in `total`.
    interactive: TokenCounter,
    last_request: Instant,
}

/// Counter of requested tokens.
#[derive(Clone, Debug, Default)]
struct TokenCounter {
    /// Since the last report.
    tokens: u64,
    /// Per second.
    rate: Option<Ewma>,
}

/// Demand of one class, as reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredDemand {
    /// Requested deployment.
    pub deployment: DeploymentName,
    /// Residency policy of the requests.
    pub residency: Residency,
    /// Region in which the requests originate.
    pub origin: RegionIndex,
    /// Requested tokens a second.
    pub tokens_per_second: u64,
}

impl DemandMeter {
    /// Records a request of an estimated number of tokens. Returns the interactive share of its class as of the last
    /// report.
    pub fn record(
        &mut self,
        deployment: &DeploymentName,
        (residency, allowed): (&Residency, RegionSet),
        origin: RegionIndex,
        (priority, tokens): (Priority, u64),
        now: Instant,
    ) -> Option<Permille> {
        let classes = self.classes.get_mut(deployment);
        if let Some(class) =
            classes.and_then(|classes| classes.iter_mut().find(|class| class.is(origin, allowed)))
        {
            class.count(priority, tokens);
            class.last_request = now;
            return class.interactive_share();
        }
        let in_deployment = self.classes.get(deployment).map_or(0, Vec::len);
        let bytes = self.residency_bytes + residency.as_str().len();
        if in_deployment >= CLASSES_PER_DEPLOYMENT_MAX
            || self.class_count >= CLASSES_MAX
            || bytes > RESIDENCY_BYTES_MAX
        {
            self.untracked += 1;
            return None;
        }
        self.class_count += 1;
        self.residency_bytes = bytes;
        let (total, interactive) = (TokenCounter::default(), TokenCounter::default());
        let mut class = DemandClass {
            residency: residency.clone(),
            allowed,
            origin,
            total,
            interactive,
            last_request: now,
        };
        class.count(priority, tokens);
        self.classes.entry(deployment.clone()).or_default().push(class);
        None
    }

    /// Returns the interactive share of a class as of the last report.
    pub fn interactive_share(
        &self,
        deployment: &DeploymentName,
        allowed: RegionSet,
        origin: RegionIndex,
    ) -> Option<Permille> {
        self.classes.get(deployment)?.iter().find(|class| class.is(origin, allowed))?.interactive_share()
    }

    /// Returns the demand of all classes. To be called about once a second.
    pub fn report(&mut self, now: Instant) -> Vec<MeasuredDemand> {
        let since = self.last_report.replace(now).map(|last| now.saturating_duration_since(last));
        let mut reported = Vec::with_capacity(self.class_count);
        for (deployment, classes) in &mut self.classes {
            classes.retain(|class| now.saturating_duration_since(class.last_request) <= CLASS_RETENTION);
            for class in classes {
                class.interactive.per_second(since, now);
                reported.push(MeasuredDemand {
                    deployment: deployment.clone(),
                    residency: class.residency.clone(),
                    origin: class.origin,
                    tokens_per_second: class.total.per_second(since, now).round() as u64,
                });
            }
        }
        self.classes.retain(|_, classes| !classes.is_empty());
        self.class_count = reported.len();
        self.residency_bytes = reported.iter().map(|class| class.residency.as_str().len()).sum();
        reported
    }

    /// Returns the number of requests so far of classes beyond the limits.
    pub fn untracked(&self) -> u64 {
        self.untracked
    }
}

impl DemandClass {
    fn is(&self, origin: RegionIndex, allowed: RegionSet) -> bool {
        self.origin == origin && self.allowed == allowed
    }

    fn count(&mut self, priority: Priority, tokens: u64) {
        self.total.tokens = self.total.tokens.saturating_add(tokens);
        if priority == Priority::Interactive {
            self.interactive.tokens = self.interactive.tokens.saturating_add(tokens);
        }
    }

    /// Returns the interactive share; `None` without demand.
    fn interactive_share(&self) -> Option<Permille> {
        let (total, interactive) = (self.total.rate?.get(), self.interactive.rate?.get());
        (total > 0.0).then(|| Permille::new((interactive / total * 1000.0).round() as u16))
    }
}

impl TokenCounter {
    /// Returns the rate, including the tokens since the last report.
    fn per_second(&mut self, since: Option<Duration>, now: Instant) -> f64 {
        // Before the first report the tokens have no period to divide by.
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

    fn request(
        demand: &mut DemandMeter,
        deployment: &str,
        regions: usize,
        origin: usize,
        tokens: u64,
        now: Instant,
    ) {
        let anywhere = Residency::of(&ResidencyPolicy::Anywhere);
        let (policy, tokens) = ((&anywhere, RegionSet::all(regions)), (Priority::Bulk, tokens));
        demand.record(&name(deployment), policy, at(origin), tokens, now);
    }

    fn reported(demand: &mut DemandMeter, now: Instant) -> Vec<(String, usize, u64)> {
        let reported = demand.report(now).into_iter();
        reported
            .map(|class| (class.deployment.to_string(), class.origin.as_usize(), class.tokens_per_second))
            .collect()
    }

    #[test]
    fn demand_is_reported_by_class_and_origin_as_a_decaying_average() {
        let (mut demand, mut now) = (DemandMeter::default(), some_instant());
        demand.report(now);
        for _ in 0..3 {
            now += SECOND;
            request(&mut demand, "d", 8, 0, 400, now);
            request(&mut demand, "d", 8, 0, 600, now);
            request(&mut demand, "d", 8, 5, 10, now);
            request(&mut demand, "d", 3, 0, 20, now);
            let expected = |origin, tokens| ("d".to_owned(), origin, tokens);
            assert_eq!(reported(&mut demand, now), [expected(0, 1000), expected(5, 10), expected(0, 20)]);
        }
        now += HALF_LIFE;
        assert_eq!(reported(&mut demand, now)[0].2, 500);
        request(&mut demand, "d", 8, 0, 5 * 1500, now);
        now += HALF_LIFE;
        assert_eq!(reported(&mut demand, now)[0].2, 1000);
    }

    #[test]
    fn the_interactive_share_is_that_of_the_tokens_of_the_class() {
        let (mut demand, mut now) = (DemandMeter::default(), some_instant());
        let (anywhere, d) = (Residency::of(&ResidencyPolicy::Anywhere), name("d"));
        let policy = (&anywhere, RegionSet::all(8));
        let part = |demand: &DemandMeter, origin| {
            demand.interactive_share(&d, policy.1, at(origin)).map(Permille::get)
        };
        demand.report(now);
        for (priority, tokens) in [(Priority::Interactive, 100), (Priority::Bulk, 300)] {
            assert_eq!(
                demand.record(&d, policy, at(0), (priority, tokens), now),
                None,
                "before the first report"
            );
        }
        demand.record(&d, policy, at(1), (Priority::Interactive, 5), now);
        demand.record(&d, policy, at(2), (Priority::Bulk, 5), now);
        now += SECOND;
        demand.report(now);
        assert_eq!([0, 1, 2, 3].map(|origin| part(&demand, origin)), [Some(250), Some(1000), Some(0), None]);
        assert_eq!(demand.record(&d, policy, at(0), (Priority::Bulk, 900), now), Some(Permille::new(250)));
        now += HALF_LIFE;
        demand.report(now);
        assert_eq!(part(&demand, 0), Some(172), "half of 100 in half of 400 and half of 900 in five seconds");
    }

    #[test]
    fn a_class_without_requests_is_reported_for_its_retention_time() {
        let (mut demand, now) = (DemandMeter::default(), some_instant());
        request(&mut demand, "d", 8, 0, 1, now);
        assert_eq!(reported(&mut demand, now + CLASS_RETENTION).len(), 1);
        assert_eq!(reported(&mut demand, now + CLASS_RETENTION + SECOND), []);
        request(&mut demand, "d", 8, 0, 1, now + CLASS_RETENTION + SECOND);
        assert_eq!(
            reported(&mut demand, now + CLASS_RETENTION + SECOND).len(),
            1,
            "and again after a new request"
        );
    }

    #[test]
    fn residencies_are_kept_up_to_the_byte_limit_and_one_more_is_untracked() {
        let (mut demand, now) = (DemandMeter::default(), some_instant());
        let region_codes =
            ('a'..='z').flat_map(|a| ('a'..='z').map(move |b| format!("us-a{a}{b}"))).take(100);
        let text = region_codes.collect::<Vec<_>>().join(",");
        let long = Residency::of(&text.parse().unwrap());
        let expected = long.as_str().len();
        let fit = RESIDENCY_BYTES_MAX / expected;
        let mut record = |number: usize, now| {
            let policy = (&long, RegionSet::all(1));
            demand.record(&name(&format!("d{number}")), policy, at(0), (Priority::Bulk, 1), now);
            demand.untracked()
        };
        assert_eq!((0..fit).map(|number| record(number, now)).max(), Some(0));
        assert_eq!(record(fit, now), 1);
        assert_eq!(demand.report(now).len(), fit);
        assert!(demand.report(now + CLASS_RETENTION + SECOND).is_empty());
        assert_eq!(demand.residency_bytes, 0, "an expired class frees its bytes");
    }

    #[test]
    fn classes_are_counted_up_to_the_limit_and_one_more_is_untracked() {
        let (mut demand, now) = (DemandMeter::default(), some_instant());
        for regions in 1..=CLASSES_PER_DEPLOYMENT_MAX {
            request(&mut demand, "d", regions, 0, 1, now);
        }
        assert_eq!((demand.untracked(), demand.class_count), (0, CLASSES_PER_DEPLOYMENT_MAX));
        request(&mut demand, "d", CLASSES_PER_DEPLOYMENT_MAX + 1, 0, 1, now);
        assert_eq!((demand.untracked(), demand.class_count), (1, CLASSES_PER_DEPLOYMENT_MAX));
        for number in CLASSES_PER_DEPLOYMENT_MAX..CLASSES_MAX {
            request(&mut demand, &format!("e{number}"), 1, 0, 1, now);
        }
        assert_eq!((demand.untracked(), demand.class_count), (1, CLASSES_MAX));
        request(&mut demand, "one-more", 1, 0, 1, now);
        assert_eq!((demand.untracked(), reported(&mut demand, now).len()), (2, CLASSES_MAX));
    }
}
