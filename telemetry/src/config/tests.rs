use super::values::{PAIRS_MAX, pairs};
use super::*;
use configuration::Problem;
use std::path::Path;

section! {
    /// File of a role.
    partial struct RoleFile {
        /// Traces.
        tracing: TracingSection;
        /// Logs.
        logs: LogsSection;
    }
}

type Read = (Option<TracingConfig>, Option<LogsConfig>);

fn read_both(text: &str, variables: &[(&str, &str)]) -> Result<Read, String> {
    let environment = variables.iter().copied().collect();
    let files = Files { base: Path::new("."), environment: Some(&environment) };
    let read = ConfigFile::read(text, |document| {
        let file = document.section::<RoleFile>()?;
        let (tracing, logs) = (file.tracing?.read(document, &files), file.logs?.read(document, &files));
        Some((tracing?, logs?))
    });
    read.map_err(|found: Vec<Problem>| found.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
}

fn read(text: &str, variables: &[(&str, &str)]) -> Result<Option<TracingConfig>, String> {
    read_both(text, variables).map(|(tracing, _)| tracing)
}

fn endpoint(text: &str, variables: &[(&str, &str)]) -> Option<String> {
    read(text, variables).unwrap().map(|config| config.collector.endpoint.to_string())
}

#[test]
fn without_an_endpoint_nothing_is_recorded() {
    for text in ["", "[tracing]\nsample_ratio = 1.0"] {
        assert!(read(text, &[]).unwrap().is_none(), "{text}");
    }
    let of_file = "[tracing]\nendpoint = \"http://127.0.0.1:4318\"";
    for off in [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")] {
        assert!(read(of_file, &[off]).unwrap().is_none(), "{off:?}");
    }
    assert!(
        read(of_file, &[("OTEL_SDK_DISABLED", "False"), ("OTEL_TRACES_EXPORTER", "otlp")]).unwrap().is_some()
    );
}

#[test]
fn the_path_of_traces_is_appended_as_the_specification_says() {
    let (general, traces) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
    let of = |variables: &[(&str, &str)]| endpoint("", variables).unwrap();
    assert_eq!(of(&[(general, "http://a:4318")]), "http://a:4318/v1/traces");
    assert_eq!(of(&[(general, "http://a:4318/otlp/")]), "http://a:4318/otlp/v1/traces");
    assert_eq!(of(&[(traces, "http://a:4318/"), (general, "http://b")]), "http://a:4318/");
    assert_eq!(of(&[(general, "http://a:4317"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]), "http://a:4317/");
    let file =
        |url: &str| endpoint(&format!("[tracing]\nendpoint = \"{url}\""), &[(general, "http://b")]).unwrap();
    assert_eq!(file("https://a"), "https://a/v1/traces");
    assert_eq!(file("http://[::1]:4318/x"), "http://[::1]:4318/x");
}

#[test]
fn the_file_takes_precedence_over_the_environment() {
    let text = "[tracing]\nendpoint = \"http://a:4317\"\nprotocol = \"grpc\"\nsample_ratio = 0.5\ntimeout = \"2s\"\nslow = \"200ms\"";
    let variables = [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_TRACES_SAMPLER", "always_off"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "5000"),
        ("OTEL_SERVICE_NAME", "edge"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test, a=b%20c"),
    ];
    let TracingConfig { collector: config, sampler, keep } = read(text, &variables).unwrap().unwrap();
    assert_eq!((config.protocol, config.timeout), (ExportProtocol::Grpc, Duration::from_secs(2)));
    assert_eq!(sampler, HeadSampler::new(0.5, true));
    assert_eq!(keep, KeepPolicy { slow: Duration::from_millis(200), per_second: KEPT_PER_SECOND });
    assert_eq!(config.service_name.as_deref(), Some("edge"));
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(config.resource, [pair("deployment.environment.name", "test"), pair("a", "b c")]);
}

#[test]
fn the_samplers_of_opentelemetry_are_known() {
    let of = |name: &str, argument: &str| {
        let variables = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a"),
            ("OTEL_TRACES_SAMPLER", name),
            ("OTEL_TRACES_SAMPLER_ARG", argument),
        ];
        read("", &variables).unwrap().unwrap().sampler
    };
    assert_eq!(of("", ""), HeadSampler::new(SAMPLE_RATIO, true));
    assert_eq!(of("always_on", ""), HeadSampler::new(1.0, false));
    assert_eq!(of("always_off", ""), HeadSampler::new(0.0, false));
    assert_eq!(of("traceidratio", "0.25"), HeadSampler::new(0.25, false));
    assert_eq!(of("parentbased_always_on", ""), HeadSampler::new(1.0, true));
    assert_eq!(of("parentbased_always_off", ""), HeadSampler::new(0.0, true));
    assert_eq!(of("parentbased_traceidratio", "1"), HeadSampler::new(1.0, true));
}

#[test]
fn an_invalid_value_is_reported_with_its_key_or_variable() {
    let check = |text: &str, variable: (&str, &str), parts: [&str; 2]| {
        let variables = [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:4318"), variable];
        let problem = read(text, &variables).map(|_| ()).expect_err(variable.0);
        for part in parts {
            assert!(problem.contains(part), "{part} in {problem}");
        }
        assert!(!problem.contains("s3cret"), "{problem}");
    };
    let none = ("A", "b");
    check("[tracing]\nendpoint = \"collector:4318\"", none, ["tracing.endpoint", "http://HOST:PORT"]);
    check("[tracing]\nendpoint = \"http://user:s3cret@a\"", none, ["tracing.endpoint", "headers_file"]);
    // `Uri` does not parse these.
    check("[tracing]\nendpoint = \"http://user:s3cret word@a\"", none, ["tracing.endpoint", "headers_file"]);
    check("[tracing]\nendpoint = \"http://user:s3cret@a:port\"", none, ["tracing.endpoint", "headers_file"]);
    check("[tracing]\nprotocol = \"http/json\"", none, ["tracing.protocol", "\"grpc\" or \"http/protobuf\""]);
    check("[tracing]\nsample_ratio = 1.5", none, ["tracing.sample_ratio", "1.5"]);
    check("[tracing]\nsampler = \"always_on\"\nsample_ratio = 0.5", none, ["sample_ratio", "no effect"]);
    check("[tracing]\nca = \"missing.pem\"", none, ["tracing.ca", "missing.pem"]);
    check("[tracing]\nheaders_env = \"MISSING\"", none, ["tracing.headers_env", "MISSING"]);
    for (variable, value, part) in [
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "ftp://a", "\"ftp://a\""),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "http/protobuf"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "parentbased_traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "2", "from 0 to 1"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "\"otlp\" or \"none\""),
        ("OTEL_SDK_DISABLED", "yes", "\"true\" or \"false\""),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0", "1 to 60000"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key", "entry 1"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a=b,c", "entry 2"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "missing.pem", "missing.pem"),
    ] {
        check("", (variable, value), [variable, part]);
    }
}

#[test]
fn headers_are_read_from_a_variable_and_are_not_shown() {
    let text = "[tracing]\nendpoint = \"http://a\"\nheaders_env = \"COLLECTOR\"";
    let config = read(text, &[("COLLECTOR", "api-key=s3cret,x=a%3Db")]).unwrap().unwrap();
    let headers = &config.collector.headers.0;
    let texts: Vec<_> =
        headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    assert_eq!(texts, [("api-key", "s3cret"), ("x", "a=b")]);
    assert!(!format!("{config:?}").contains("s3cret"));
    let problem = read(text, &[("COLLECTOR", "s3cret")]).map(|_| ()).unwrap_err();
    assert!(problem.contains("tracing.headers_env") && !problem.contains("s3cret"), "{problem}");
    let entries = |count: usize| vec!["a=b"; count].join(",");
    assert_eq!(pairs(&entries(PAIRS_MAX)).map(|read| read.len()), Ok(PAIRS_MAX), "at the limit");
    assert!(pairs(&entries(PAIRS_MAX + 1)).is_err(), "one past it");
}

#[test]
fn a_url_has_a_port_that_exists_and_neither_query_nor_fragment() {
    let port = "from 1 to 65535";
    for (url, part) in [
        ("http://127.0.0.1:99999", port),
        ("http://127.0.0.1:65536", port),
        ("http://[::1]:65536", port),
        ("http://127.0.0.1:0", port),
        ("https://collector:", port),
        ("http://collector:4318?key=s3cret", "no query and no fragment"),
        ("http://collector:4318/v1/traces#s3cret", "no query and no fragment"),
        ("http://s3cret@collector:4318", "no user"),
        ("http://:4318", "http://HOST:PORT"),
    ] {
        for (table, variable) in
            [("tracing", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), ("logs", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT")]
        {
            let key = format!("{table}.endpoint");
            let of_file = read_both(&format!("[{table}]\nendpoint = \"{url}\""), &[]);
            for (field, read) in [(key.as_str(), of_file), (variable, read_both("", &[(variable, url)]))] {
                let problem = read.map(|_| ()).expect_err(url);
                assert!(problem.contains(field) && problem.contains(part), "{problem}");
                assert!(!problem.contains("s3cret"), "{problem}");
            }
        }
    }
    for url in ["http://127.0.0.1:1/", "https://collector.example:65535/x", "http://[::1]:4318/"] {
        let variable = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url);
        assert_eq!(endpoint("", &[variable]).as_deref(), Some(url), "at the limits");
    }
}

#[test]
fn the_compression_is_that_of_the_signal_or_of_all_signals() {
    let of = |variables: &[(&str, &str)]| {
        let both =
            read_both("[tracing]\nendpoint = \"http://a\"\n[logs]\nendpoint = \"http://a\"", variables);
        both.map(|(tracing, logs)| {
            [tracing.unwrap().collector, logs.unwrap().collector].map(|of| of.compression)
        })
    };
    let (gzip, none) = (ExportCompression::Gzip, ExportCompression::None);
    let general = "OTEL_EXPORTER_OTLP_COMPRESSION";
    assert_eq!(of(&[]), Ok([none, none]));
    assert_eq!(of(&[(general, "gzip")]), Ok([gzip, gzip]));
    assert_eq!(of(&[(general, "gzip"), ("OTEL_EXPORTER_OTLP_LOGS_COMPRESSION", "none")]), Ok([gzip, none]));
    let own = ["OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_LOGS_COMPRESSION"];
    for variable in own.into_iter().chain([general]) {
        for value in ["zstd", "gzipped"] {
            let problem = of(&[(variable, value)]).expect_err(value);
            assert!(problem.contains(variable) && problem.contains("\"gzip\" or \"none\""), "{problem}");
        }
    }
}

#[test]
fn headers_that_http_forbids_or_that_the_client_writes_are_rejected() {
    let text = "[tracing]\nendpoint = \"http://a\"\nheaders_env = \"COLLECTOR\"";
    for (value, part) in [
        ("a=b,s3cret(x)=c", "entry 2 has a name or a value that HTTP does not permit"),
        ("s3cret[]=c", "entry 1 has a name"),
        ("a=s3cret%C3%A9", "entry 1 has a name or a value"),
        ("a=b,Content-Length=3", "entry 2 is the header content-length"),
        ("host=a", "header host"),
        ("transfer-encoding=chunked", "header transfer-encoding"),
        ("connection=close", "header connection"),
    ] {
        let of_file = read(text, &[("COLLECTOR", value)]);
        let of_variable =
            read("[tracing]\nendpoint = \"http://a\"", &[("OTEL_EXPORTER_OTLP_HEADERS", value)]);
        for (field, read) in [("tracing.headers_env", of_file), ("OTEL_EXPORTER_OTLP_HEADERS", of_variable)] {
            let problem = read.map(|_| ()).expect_err(value);
            assert!(problem.contains(field) && problem.contains(part), "{problem}");
            assert!(!problem.contains("s3cret"), "{problem}");
        }
    }
}

/// Regression: a variable that another process of the machine uses prevented the start.
#[test]
fn an_invalid_variable_of_exports_is_reported_only_where_something_is_exported() {
    let general = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a");
    for variable in [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "missing.pem"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
    ] {
        assert!(read_both("", &[variable]).is_ok(), "{variable:?} without an endpoint");
        let disabled = [general, variable, ("OTEL_SDK_DISABLED", "true")];
        assert!(read_both("", &disabled).is_ok(), "{variable:?} without an export");
        let of_logs = [("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "http://a/v1/logs"), variable];
        assert_eq!(
            read_both("", &of_logs).is_ok(),
            variable.0 == "OTEL_TRACES_SAMPLER",
            "{variable:?}, which logs have"
        );
        assert!(read_both("", &[general, variable]).is_err(), "{variable:?}");
    }
    // What says whether something is exported is always read.
    for variable in [("OTEL_SDK_DISABLED", "yes"), ("OTEL_TRACES_EXPORTER", "zipkin")] {
        assert!(read_both("", &[variable]).is_err(), "{variable:?}");
    }
}

#[test]
fn a_client_certificate_is_rejected_where_something_is_exported() {
    let (endpoint, key) = (("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a"), "key.pem");
    for variable in [
        "OTEL_EXPORTER_OTLP_CLIENT_KEY",
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
        "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY",
        "OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE",
        "OTEL_EXPORTER_OTLP_LOGS_CLIENT_KEY",
        "OTEL_EXPORTER_OTLP_LOGS_CLIENT_CERTIFICATE",
    ] {
        let problem = read_both("", &[endpoint, (variable, key)]).map(|_| ()).expect_err(variable);
        for part in [variable, "not supported", "unset it"] {
            assert!(problem.contains(part), "{part} in {problem}");
        }
        assert!(read_both("", &[(variable, key)]).is_ok(), "nothing is exported");
        assert!(read_both("", &[endpoint, (variable, key), ("OTEL_SDK_DISABLED", "true")]).is_ok());
    }
}

#[test]
fn logs_have_their_own_section_and_variables() {
    let logs = |text: &str, variables: &[(&str, &str)]| read_both(text, variables).unwrap().1;
    let endpoint = |text: &str, variables: &[(&str, &str)]| {
        logs(text, variables).map(|config| config.collector.endpoint.to_string())
    };
    let (general, own) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT");
    assert_eq!(
        endpoint("[tracing]\nendpoint = \"http://a\"", &[]),
        None,
        "a collector of traces is none of logs"
    );
    assert_eq!(endpoint("", &[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://a")]), None);
    assert_eq!(endpoint("", &[(general, "http://a:4318")]).as_deref(), Some("http://a:4318/v1/logs"));
    assert_eq!(endpoint("", &[(own, "http://a/x"), (general, "http://b")]).as_deref(), Some("http://a/x"));
    let file = "[logs]\nendpoint = \"http://a\"\nlevel = \"warn\"\ntimeout = \"2s\"";
    let config = logs(file, &[(general, "http://b"), ("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "5000")]).unwrap();
    assert_eq!((config.level, config.collector.timeout), (LogLevel::Warn, Duration::from_secs(2)));
    assert_eq!(config.collector.endpoint, "http://a/v1/logs");
    for off in [("OTEL_SDK_DISABLED", "true"), ("OTEL_LOGS_EXPORTER", "none")] {
        assert!(logs(file, &[off]).is_none(), "{off:?}");
    }
    let both = [(general, "http://a"), ("OTEL_LOGS_EXPORTER", "none")];
    assert!(read_both("", &both).is_ok_and(|(tracing, logs)| tracing.is_some() && logs.is_none()));
    assert_eq!(logs("", &[(general, "http://a")]).map(|config| config.level), Some(LogLevel::Trace));
}

#[test]
fn an_invalid_value_of_logs_is_reported_with_its_key_or_variable() {
    let problem = |text: &str, variable: (&str, &str)| {
        read_both(text, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a"), variable]).map(|_| ()).unwrap_err()
    };
    for (text, part) in [
        ("[logs]\nendpoint = \"collector:4318\"", "logs.endpoint"),
        ("[logs]\nlevel = \"warning\"", "logs.level"),
        ("[logs]\nca = \"missing.pem\"", "logs.ca"),
        ("[logs]\nheaders_env = \"MISSING\"", "logs.headers_env"),
        ("[logs]\ntimeout = \"2m\"", "logs.timeout"),
    ] {
        let problem = problem(text, ("A", "b"));
        assert!(problem.contains(part), "{part} in {problem}");
    }
    for (variable, value, part) in [
        ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "ftp://a", "\"ftp://a\""),
        ("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "http/json", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "x", "1 to 60000"),
        ("OTEL_EXPORTER_OTLP_LOGS_HEADERS", "s3cret", "entry 1"),
        ("OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE", "missing.pem", "missing.pem"),
        ("OTEL_LOGS_EXPORTER", "console", "\"otlp\" or \"none\""),
    ] {
        let problem = problem("", (variable, value));
        assert!(problem.contains(variable) && problem.contains(part), "{problem}");
        assert!(!problem.contains("s3cret"), "{problem}");
    }
}
