//! How far away a region is, in time.
//!
//! Before anything was measured there is only the globe. Light in fibre runs at two thirds of its speed in vacuum, cables
//! do not follow great circles, and routers and last miles cost a constant: [`prior_rtt`] is
//! `8 ms + 1.45 · 2d / (2c/3)`. Against 2442 measured pairs of Azure regions it errs by 14 ms at the median and 13 %, and
//! by 68 ms and 35 % at the 90th percentile; choosing by distance alone costs 6 to 7 ms on average and over 100 ms in one
//! choice of a hundred. Good enough to start with, not to stay with.
//!
//! So each report exchange with a region is a sample of the true round trip. Noise in a round trip is one-sided, queues
//! only ever add, so what counts is the *minimum* of a window of [`WINDOW`] samples; the minima are averaged with decay so
//! that one lucky window does not move traffic. The first closed window replaces the prior. A region that has been silent
//! for [`STALE_AFTER`] has no measurement any more and starts again from the prior.

use std::time::{Duration, Instant};

use crate::catalogue::Catalogue;
use crate::ewma::Ewma;
use crate::geography::GeoPoint;
use crate::set::RegionIndex;

/// Samples per window, and so also the number after which the prior is replaced: 3.2 s of reports every 200 ms.
pub const WINDOW: u32 = 16;

/// Age of the newest sample beyond which a measurement is worth less than the prior.
pub const STALE_AFTER: Duration = Duration::from_secs(5 * 60);

/// A new path is half believed after this long: three windows of reports, so one odd window moves the estimate by a fifth.
pub const HALF_LIFE: Duration = Duration::from_secs(10);

/// What a round trip costs at no distance at all: hosts, routers, last miles.
const BASE: Duration = Duration::from_millis(8);

/// By how much the cable is longer than the great circle, as fitted to 2442 pairs of Azure regions.
const DETOUR: f64 = 1.45;

/// Light in fibre: two thirds of 299 792.458 km/s.
const FIBRE_KM_PER_S: f64 = 299_792.458 * 2.0 / 3.0;

/// The round trip to expect over a great-circle distance: `8 ms + 1.45 · 2d / (2c/3)`.
pub fn prior_rtt(distance_km: f64) -> Duration {
    BASE + seconds(DETOUR * 2.0 * distance_km / FIBRE_KM_PER_S)
}

/// A duration from its length in seconds. Half the Earth's girth takes 0.3 s, so nanoseconds never saturate.
fn seconds(seconds: f64) -> Duration {
    Duration::from_nanos((seconds * 1e9) as u64)
}

/// The round trip to each region, as seen from one place.
#[derive(Clone, Debug)]
pub struct LatencyModel {
    paths: Vec<Path>,
}

/// What is known of the way to one region.
#[derive(Clone, Debug)]
struct Path {
    place: GeoPoint,
    prior: Duration,
    measured: Option<Ewma>,
    window: Window,
    newest: Option<Instant>,
}

/// The window being filled.
#[derive(Clone, Copy, Debug)]
struct Window {
    samples: u32,
    least: Duration,
}

impl Window {
    const EMPTY: Window = Window { samples: 0, least: Duration::MAX };
}

impl LatencyModel {
    /// The model of somebody who stands at `origin` and has measured nothing yet.
    pub fn new(origin: GeoPoint, catalogue: &Catalogue) -> LatencyModel {
        let paths = catalogue
            .iter()
            .map(|(_, region)| Path {
                place: region.point,
                prior: prior_rtt(origin.distance_km(region.point)),
                measured: None,
                window: Window::EMPTY,
                newest: None,
            })
            .collect();
        LatencyModel { paths }
    }

    /// Takes in one measured round trip.
    pub fn observe(&mut self, region: RegionIndex, rtt: Duration, now: Instant) {
        let path = &mut self.paths[region.as_usize()];
        if path.is_stale(now) {
            path.measured = None;
            path.window = Window::EMPTY;
        }
        path.newest = path.newest.max(Some(now));
        path.window = Window { samples: path.window.samples + 1, least: path.window.least.min(rtt) };
        if path.window.samples == WINDOW {
            let least = path.window.least.as_secs_f64();
            path.measured = match path.measured {
                None => Some(Ewma::new(HALF_LIFE, least, now)),
                Some(mut average) => {
                    average.add(least, now);
                    Some(average)
                }
            };
            path.window = Window::EMPTY;
        }
    }

    /// The round trip to expect: the measured one where there is one, else the prior.
    pub fn estimate(&self, region: RegionIndex, now: Instant) -> Duration {
        let path = &self.paths[region.as_usize()];
        match path.measured {
            Some(average) if !path.is_stale(now) => seconds(average.get()),
            Some(_) | None => path.prior,
        }
    }

    /// The round trip to expect from another place than ours, of which only the distance is known.
    pub fn prior_from(&self, point: GeoPoint, region: RegionIndex) -> Duration {
        prior_rtt(point.distance_km(self.paths[region.as_usize()].place))
    }
}

impl Path {
    fn is_stale(&self, now: Instant) -> bool {
        self.newest.is_none_or(|newest| now.saturating_duration_since(newest) > STALE_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const REPORT_INTERVAL: Duration = Duration::from_millis(200);

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    struct Scene {
        model: LatencyModel,
        region: RegionIndex,
        prior: Duration,
        now: Instant,
    }

    /// A gateway in Ashburn that looks at Frankfurt.
    fn scene() -> Scene {
        let catalogue = Catalogue::builtin();
        let region = catalogue.index_of(&"aws/eu-central-1".parse().unwrap()).unwrap();
        let model = LatencyModel::new("39.04,-77.49".parse().unwrap(), &catalogue);
        let now = some_instant();
        Scene { prior: model.estimate(region, now), model, region, now }
    }

    impl Scene {
        fn reports(&mut self, count: u32, rtt: impl Fn(u32) -> Duration) {
            for report in 0..count {
                self.now += REPORT_INTERVAL;
                self.model.observe(self.region, rtt(report), self.now);
            }
        }

        #[track_caller]
        fn expect(&self, expected: Duration) {
            let estimate = self.model.estimate(self.region, self.now);
            assert!(
                estimate.abs_diff(expected) < Duration::from_micros(1),
                "{estimate:?} is not {expected:?}"
            );
        }
    }

    #[test]
    fn the_prior_is_the_formula() {
        assert_eq!(prior_rtt(0.0), ms(8));
        // 1.45 · 2 · 6560 km / (199 861.6 km/s) = 95.19 ms.
        let prior = prior_rtt(6560.0).as_secs_f64() * 1e3;
        assert!((prior - 103.19).abs() < 0.01, "{prior} ms");
    }

    #[test]
    fn the_prior_stands_until_the_sixteenth_sample() {
        let mut scene = scene();
        scene.reports(WINDOW - 1, |_| ms(88));
        scene.expect(scene.prior);
        scene.reports(1, |_| ms(88));
        scene.expect(ms(88));
    }

    #[test]
    fn queues_on_the_way_do_not_count_because_the_least_of_a_window_does() {
        let mut scene = scene();
        scene.reports(10 * WINDOW, |report| if report % WINDOW == 3 { ms(88) } else { ms(400) });
        scene.expect(ms(88));
    }

    #[test]
    fn a_longer_path_is_believed_little_by_little_and_in_the_end() {
        let mut scene = scene();
        scene.reports(WINDOW, |_| ms(88));
        scene.reports(WINDOW, |_| ms(188));
        // One window is 3.2 s, so it weighs 1 - 2^-0.32 = 0.199.
        let estimate = scene.model.estimate(scene.region, scene.now).as_secs_f64() * 1e3;
        assert!((estimate - 107.9).abs() < 0.1, "{estimate} ms");
        scene.reports(40 * WINDOW, |_| ms(188));
        let estimate = scene.model.estimate(scene.region, scene.now);
        assert!(estimate.abs_diff(ms(188)) < ms(1), "{estimate:?}");
    }

    #[test]
    fn a_silent_region_goes_back_to_the_prior_and_is_measured_afresh() {
        let mut scene = scene();
        scene.reports(WINDOW + 5, |_| ms(10));
        scene.now += STALE_AFTER;
        scene.expect(ms(10));
        scene.now += ms(1);
        scene.expect(scene.prior);
        scene.reports(WINDOW - 1, |_| ms(70));
        scene.expect(scene.prior);
        scene.reports(1, |_| ms(70));
        scene.expect(ms(70));
    }

    #[test]
    fn from_another_place_only_the_distance_is_known() {
        let mut scene = scene();
        scene.reports(WINDOW, |_| ms(88));
        let from_frankfurt = scene.model.prior_from("50.11,8.68".parse().unwrap(), scene.region);
        assert!(from_frankfurt < ms(9), "{from_frankfurt:?}");
    }
}
