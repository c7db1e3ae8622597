# The built-in rules, a backend and a rule about /metrics.
vcl 4.1;

backend chargpt {
    .host = "127.0.0.1";
    .port = "@SERVICE@";
    .first_byte_timeout = 310s;
    .between_bytes_timeout = 310s;
}

sub vcl_recv {
    # The second for /%6detrics: the path is compared as the client has written it.
    if (req.url ~ "^/metrics" || req.url ~ "^[^?]*%") {
        return (synth(403));
    }
}

sub vcl_backend_fetch {
    set bereq.http.X-Request-Id = "varnish-" + bereq.xid;
}
