//! Badges of the events above the plots of a page: the numbers of the events, at their times.
//!
//! The text of an event is as long as the plot is wide if there are a dozen of them, so the plots show numbers and the
//! page lists the texts. Two numbers that would overlap share a badge, such as `4–7`: there is one row of badges, whatever
//! the number of events, and no two of them overlap.

/// Width of a badge without its text, and of a digit or dash at the page's font size, with some margin for other fonts.
const PADDING: f64 = 10.0;
const CHARACTER: f64 = 8.5;

/// Minimum space between two badges.
const GAP: f64 = 3.0;

/// Numbers of one or several consecutive events.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Badge {
    /// Left edge.
    pub(super) left: f64,
    /// Width.
    pub(super) width: f64,
    /// Number of the event, or the first and the last of several.
    pub(super) text: String,
    /// Whether one of the events is an action.
    pub(super) is_action: bool,
}

/// Event on the time axis.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlottedEvent {
    /// Position on the axis.
    pub(super) x: f64,
    pub(super) is_action: bool,
}

/// Consecutive events of a badge, by index.
#[derive(Clone, Copy)]
struct Cluster {
    first: usize,
    last: usize,
}

/// Returns the badges between `left` and `right` for events in order of their positions.
pub(super) fn badges(events: &[PlottedEvent], left: f64, right: f64) -> Vec<Badge> {
    let mut placed: Vec<(Cluster, Badge)> = Vec::new();
    for index in 0..events.len() {
        let mut cluster = Cluster { first: index, last: index };
        let mut badge = cluster.badge(events, left, right);
        // A shared badge is wider, so it may reach the one before it as well.
        while let Some((before, former)) = placed.pop() {
            if former.left + former.width + GAP <= badge.left {
                placed.push((before, former));
                break;
            }
            cluster.first = before.first;
            badge = cluster.badge(events, left, right);
        }
        placed.push((cluster, badge));
    }
    placed.into_iter().map(|(_, badge)| badge).collect()
}

impl Cluster {
    fn badge(self, events: &[PlottedEvent], left: f64, right: f64) -> Badge {
        let Cluster { first, last } = self;
        let text =
            if first == last { (first + 1).to_string() } else { format!("{}–{}", first + 1, last + 1) };
        let width = PADDING + CHARACTER * text.chars().count() as f64;
        let centre = (events[first].x + events[last].x) / 2.0;
        Badge {
            left: (centre - width / 2.0).min(right - width).max(left),
            width,
            text,
            is_action: events[first..=last].iter().any(|event| event.is_action),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn events(xs: &[f64]) -> Vec<PlottedEvent> {
        xs.iter().map(|x| PlottedEvent { x: *x, is_action: *x < 200.0 }).collect()
    }

    #[test]
    fn distant_events_have_their_own_badges_and_near_ones_share_one() {
        let texts = |xs: &[f64]| -> Vec<String> {
            badges(&events(xs), 0.0, 1000.0).into_iter().map(|badge| badge.text).collect()
        };
        assert_eq!(texts(&[]), [""; 0]);
        assert_eq!(texts(&[100.0, 200.0, 300.0]), ["1", "2", "3"]);
        assert_eq!(texts(&[100.0, 110.0, 300.0]), ["1–2", "3"]);
        // The badge of the second and third reaches the first.
        assert_eq!(texts(&[100.0, 122.0, 124.0]), ["1–3"]);
        let shared = &badges(&events(&[190.0, 201.0]), 0.0, 1000.0)[0];
        assert!(shared.is_action, "one of two is an action");
    }

    proptest! {
        #[test]
        fn no_two_badges_overlap_and_every_event_has_one(mut xs in prop::collection::vec(60.0..1060.0_f64, 0..200)) {
            xs.sort_by(f64::total_cmp);
            let placed = badges(&events(&xs), 60.0, 1060.0);
            for badge in &placed {
                prop_assert!(badge.left >= 60.0 && badge.left + badge.width <= 1060.0, "{badge:?}");
            }
            for pair in placed.windows(2) {
                prop_assert!(pair[0].left + pair[0].width + GAP <= pair[1].left, "{pair:?}");
            }
            let numbers: Vec<(usize, usize)> = placed.iter().map(|badge| {
                let (first, last) = badge.text.split_once('–').unwrap_or((&badge.text, &badge.text));
                (first.parse().unwrap(), last.parse().unwrap())
            }).collect();
            prop_assert_eq!(numbers.first().map_or(1, |(first, _)| *first), 1);
            prop_assert_eq!(numbers.last().map_or(0, |(_, last)| *last), xs.len());
            prop_assert!(numbers.windows(2).all(|pair| pair[0].1 + 1 == pair[1].0));
        }
    }
}
