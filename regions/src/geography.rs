//! Points on the globe and the distance between them.
//!
//! The model is a sphere: against the ellipsoid it errs by at most 0.6 %, far less than the factor of 1.5 to 3 by which
//! cables err against the great circle (see [`crate::latency`]). A point stores its unit vector next to its
//! coordinates. The haversine of the angle between two points is a quarter of the square of the chord between their unit
//! vectors, so a distance costs one square root and one arcsine; a gateway computes 64 of them per request.

use std::str::FromStr;

/// Mean radius of the Earth, R₁ of IUGG/GRS 80 (Moritz, *Geodetic Reference System 1980*).
pub const EARTH_RADIUS_KM: f64 = 6371.0088;

/// Point on the globe, in degrees of latitude (north positive) and longitude (east positive).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GeoPoint {
    lat: f64,
    lon: f64,
    unit: [f64; 3],
}

/// Error for coordinates that are not on the globe.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{lat},{lon} is out of range: write a latitude from -90 to 90 and then a longitude from -180 to 180")]
pub struct CoordinatesOutOfRange {
    /// Given latitude.
    pub lat: f64,
    /// Given longitude.
    pub lon: f64,
}

/// Error for a text that is not a point.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GeoPointError {
    /// The text is not two numbers.
    #[error("`{0}` is not a point: write latitude,longitude in degrees, such as 50.11,8.68")]
    NotTwoNumbers(String),
    /// The numbers are out of range.
    #[error(transparent)]
    OutOfRange(#[from] CoordinatesOutOfRange),
}

impl GeoPoint {
    /// Returns the point with these coordinates.
    pub fn new(lat: f64, lon: f64) -> Result<GeoPoint, CoordinatesOutOfRange> {
        // A NaN is in no range.
        if !(-90.0..=90.0).contains(&lat) || !(-180.0..=180.0).contains(&lon) {
            return Err(CoordinatesOutOfRange { lat, lon });
        }
        let (sin_lat, cos_lat) = lat.to_radians().sin_cos();
        let (sin_lon, cos_lon) = lon.to_radians().sin_cos();
        Ok(GeoPoint { lat, lon, unit: [cos_lat * cos_lon, cos_lat * sin_lon, sin_lat] })
    }

    /// Returns the latitude in degrees north.
    pub fn lat(&self) -> f64 {
        self.lat
    }

    /// Returns the longitude in degrees east.
    pub fn lon(&self) -> f64 {
        self.lon
    }

    /// Returns the great-circle distance, in kilometres.
    pub fn distance_km(self, other: GeoPoint) -> f64 {
        let [x, y, z] = [0, 1, 2].map(|axis| self.unit[axis] - other.unit[axis]);
        let half_chord = (x * x + y * y + z * z).sqrt() / 2.0;
        // Rounding may push the half chord of two antipodes slightly past one, outside the domain of the arcsine.
        2.0 * EARTH_RADIUS_KM * half_chord.min(1.0).asin()
    }
}

impl FromStr for GeoPoint {
    type Err = GeoPointError;

    fn from_str(text: &str) -> Result<GeoPoint, GeoPointError> {
        let numbers = text
            .split_once(',')
            .and_then(|(lat, lon)| Some((lat.trim().parse::<f64>().ok()?, lon.trim().parse::<f64>().ok()?)));
        let Some((lat, lon)) = numbers else {
            return Err(GeoPointError::NotTwoNumbers(text.chars().take(64).collect()));
        };
        Ok(GeoPoint::new(lat, lon)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(text: &str) -> GeoPoint {
        text.parse().unwrap()
    }

    #[test]
    fn known_distances_are_computed_within_one_percent() {
        let cases = [
            ("Frankfurt to Ashburn", "50.11,8.68", "39.04,-77.49", 6560.0),
            ("Tokyo to Osaka", "35.68,139.69", "34.69,135.50", 396.0),
            ("London to New York", "51.51,-0.13", "40.71,-74.01", 5570.0),
            ("Sydney to Santiago, over the date line", "-33.87,151.21", "-33.45,-70.67", 11_340.0),
        ];
        for (name, a, b, expected_km) in cases {
            let km = point(a).distance_km(point(b));
            assert!((km / expected_km - 1.0).abs() < 0.01, "{name}: {km}");
        }
    }

    #[test]
    fn antipodes_are_half_the_circumference_apart() {
        let half_circumference = std::f64::consts::PI * EARTH_RADIUS_KM;
        for (a, b) in [("90,0", "-90,0"), ("0,0", "0,180"), ("12.5,-45", "-12.5,135")] {
            assert!((point(a).distance_km(point(b)) - half_circumference).abs() < 1e-3, "{a} to {b}");
        }
        assert_eq!(point("0,180").distance_km(point("0,180")), 0.0);
        assert!(point("10,180").distance_km(point("10,-180")) < 1e-6);
    }

    #[test]
    fn the_distance_to_an_antipode_is_a_number_everywhere() {
        for (lat, lon) in
            (-90..=90).flat_map(|lat| (-180..=0).map(move |lon| (f64::from(lat), f64::from(lon))))
        {
            let antipode = GeoPoint::new(-lat, lon + 180.0).unwrap();
            let km = GeoPoint::new(lat, lon).unwrap().distance_km(antipode);
            assert!((km - std::f64::consts::PI * EARTH_RADIUS_KM).abs() < 1e-3, "{lat},{lon}: {km}");
        }
    }

    #[test]
    fn coordinates_at_the_limit_are_accepted_and_past_it_rejected() {
        for text in ["90,180", "-90,-180", " 1 , 2 "] {
            assert!(text.parse::<GeoPoint>().is_ok(), "{text}");
        }
        for text in ["90.01,0", "-90.01,0", "0,180.01", "0,-180.01", "NaN,0", "0,inf"] {
            assert!(matches!(text.parse::<GeoPoint>(), Err(GeoPointError::OutOfRange(_))), "{text}");
        }
        for text in ["", "1", "1;2", "1,2,3", "north,west"] {
            assert!(matches!(text.parse::<GeoPoint>(), Err(GeoPointError::NotTwoNumbers(_))), "{text}");
        }
    }
}
